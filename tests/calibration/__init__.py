"""Tests of ``lmi_core.calibration``."""
