"""`modelswarm batch`: sends the requests of a file, and writes each answer as a line of another file.

`docs/cli.md` describes both files. The options are in `commands/batch.py`.
"""
