"""Plans and schedules: how layers become stages, what a step costs, and which plan is fastest.

Nothing here imports torch, starts a thread, or reads a file, so a run can be planned on any machine.
"""
