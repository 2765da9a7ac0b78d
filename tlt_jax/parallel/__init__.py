"""Devices, the mesh, and the one table that maps logical axes to mesh axes."""
