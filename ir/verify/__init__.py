"""The rules of the IR, one file for each thing that has rules, and the verifier that asks them all.

In: a module in any phase. Out: nothing, or an `IRError` that underlines the op.
"""
