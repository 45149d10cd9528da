"""Communication on a device's streams: what all libraries for it have in common."""
