"""What the compiled CUDA kernels are held to: registers, waits and what their loops issue."""
