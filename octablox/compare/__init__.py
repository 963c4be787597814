"""`octablox compare`: what a recipe costs in loss, and what it saves.

plan: which runs; runner: trains them; results: what they came to; figures, page: how it is shown.
"""
