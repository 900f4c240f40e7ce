"""Objects that `--json` prints: all fields always there, numbers as numbers, absent values as null.

`docs/cli.md` describes the objects. Imports no tables, so that scripts do not wait for them.
"""
