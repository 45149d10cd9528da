"""The IR: types, ops, modules, their text form and their rules. The standard library alone."""
