"""The IR: types, ops, modules, their text form and their rules. It imports no other package."""
