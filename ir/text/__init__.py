"""The text form of the IR, below its parser and printer, and equality, which is that of the text.

In: files and text. Out: tokens, and the types, places and attribute values that they spell.
"""
