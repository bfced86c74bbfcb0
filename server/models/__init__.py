"""The models of a server: chosen, loaded, registered, and what stands behind each."""
