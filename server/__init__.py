"""The HTTP server (installed as ``lmi_server``): one module per protocol over ``lmi_core``."""
