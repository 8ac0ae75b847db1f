"""Question/answer pairs, a multiple-choice task and a raw corpus from the documentation in CPython
itself.
"""
