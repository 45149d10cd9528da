"""State in a module of its own, that methods of actors in other modules use."""

COUNT = 0


def bump() -> int:
    """One more each time."""
    global COUNT
    COUNT += 1
    return COUNT
