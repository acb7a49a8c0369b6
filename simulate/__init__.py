"""Schedules of other papers beside RoundPipe's: an event simulator, a table of schedules, reports and pictures.

It is a package beside the product, which imports nothing of it. `torchround/simulate` links here.
"""
