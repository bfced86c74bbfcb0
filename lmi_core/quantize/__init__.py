"""``lmi quantize``: a checkpoint written anew in fewer bits, in formats that others read."""
