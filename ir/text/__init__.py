"""The text form of the IR: its lexer, parser and printer, and errors that show the IR.

In: files, text or modules. Out: modules or text.
"""
