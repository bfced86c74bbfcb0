"""Ours and one other engine, alternating on one machine: ``python -m bench.peers``.

One module per peer holds how it is installed, how a checkpoint is converted for it, and the driver
that runs inside its own virtual environment. Drivers import nothing but the standard library, this
package's ``driver`` and the peer itself.
"""
