"""Steps on torch devices: recorded, uploaded, replayed."""
