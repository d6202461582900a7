"""Starting ranks: on one machine, with progress, and with the failed rank named."""
