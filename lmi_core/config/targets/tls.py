"""The certificate that a configuration names, loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmi_core.config.targets.server_config import ServerConfig
from lmi_core.errors import ConfigError

if TYPE_CHECKING:
    import ssl


def tls_context(server: ServerConfig) -> ssl.SSLContext | None:
    """What speaks https with the configured certificate; None: http. ConfigError for files that
    can't be used."""
    if server.certificate_file is None:
        return None
    import ssl

    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(server.certificate_file, server.private_key_file)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"certificate_file={server.certificate_file} and "
            f"private_key_file={server.private_key_file} can't be used: {error}",
            field="certificate_file",
        ) from None
    return context
