"""Timing of schedules: an event simulator for any schedule, and an exact recurrence for RoundPipe's."""
