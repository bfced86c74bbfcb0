"""The HTTP server (installed as ``lmi_server``): a package for each protocol over ``lmi_core``."""
