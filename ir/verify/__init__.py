"""The rules of the IR, one file for each subject, and the verifier that checks them all.

In: a module in any phase. Out: nothing, or an `IRError` that underlines the op.
"""
