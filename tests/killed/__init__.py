"""Processes that are killed while they plan, and files that are damaged: what the next run makes of both."""
