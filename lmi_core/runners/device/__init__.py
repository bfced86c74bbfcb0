"""The runners of torch devices: steps launched from Python or by C++ threads."""
