"""Writes the change into an engine's own tree, for those who keep a fork: ``sglang-w4afp8 fork TREE``.

What is written is taken from this package's modules when the command runs; nothing is kept twice. ``source`` reads and
edits Python files by syntax tree, ``edits`` says what becomes of each engine file, ``suites`` writes the tests, ``tree``
finds, writes and takes back, ``cli`` is the command.
"""
