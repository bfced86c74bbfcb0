"""One module per wire protocol, all behind the seam in ``base``."""
