"""Question/answer pairs, a task and a raw corpus from the documentation in CPython itself.

The task is of multiple choice.
"""
