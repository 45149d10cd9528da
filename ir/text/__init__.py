"""The text form of the IR, below its parser and printer.

In: files and text. Out: tokens, and the types, places and attribute values that they spell.
"""
