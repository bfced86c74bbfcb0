"""Where a server listens, as its configuration says."""

import pytest

from lmi_core.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("http://0.0.0.0:8081", ("0.0.0.0", 8081)),
        ("http://localhost", ("localhost", 80)),
        ("http://[::1]:90", ("::1", 90)),
        ("127.0.0.1:7", ("127.0.0.1", 7)),
    ],
)
def test_addresses(resolved, text, expected):
    server = resolved("org/m", environ={"SERVING_INFERENCE_ADDRESS": text}).server
    assert (server.host, server.port) == expected


@pytest.mark.parametrize(
    "text", ["https://h:1", "unix:/s", "ftp://h", "http://h:99999", "http://h:1/x"]
)
def test_impossible_addresses(resolved, text):
    with pytest.raises(ConfigError, match="inference_address"):
        resolved("org/m", environ={"SERVING_INFERENCE_ADDRESS": text})


@pytest.mark.parametrize(
    ("inference", "management", "expected"),
    [
        (None, "http://127.0.0.1:8080", None),
        ("http://0.0.0.0:8080", "http://0.0.0.0:8080", None),
        (None, "http://127.0.0.1:8081", ("http", "127.0.0.1", 8081)),
        ("http://0.0.0.0:80", "localhost:8081", ("http", "localhost", 8081)),
        ("http://127.0.0.1:0", "http://[::1]:0", ("http", "::1", 0)),
    ],
)
def test_management_addresses(resolved, inference, management, expected):
    given = {"SERVING_INFERENCE_ADDRESS": inference, "SERVING_MANAGEMENT_ADDRESS": management}
    deployment = resolved("org/m", environ={k: v for k, v in given.items() if v is not None})
    assert deployment.server.management == expected
    assert not deployment.warnings


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("http://0.0.0.0:8080", "write the same address twice, or two ports"),
        ("unix:/s", "management_address='unix:/s': Unix sockets are not available"),
        ("http://h:99999", "is not http://host:port"),
        ("https://127.0.0.1:8443", "management_address is https, which needs certificate_file"),
    ],
)
def test_impossible_management_addresses(resolved, text, message):
    with pytest.raises(ConfigError, match=message):
        resolved("org/m", environ={"SERVING_MANAGEMENT_ADDRESS": text})


def test_a_flag_with_a_certificate_asks_for_https(resolved):
    """As vLLM's: who writes it doesn't mean plain text."""
    flags = ("--ssl-certfile", "c.pem", "--ssl-keyfile", "k.pem")
    assert resolved("org/m", *flags).server.scheme == "https"
    with pytest.raises(ConfigError, match="--ssl-certfile: inference_address is https"):
        resolved("org/m", *flags[:2])
    said = {"SERVING_INFERENCE_ADDRESS": "http://0.0.0.0:8080"}
    deployment = resolved("org/m", *flags, environ=said)
    assert deployment.server.scheme == "http"
    assert "counts only where an address is https" in deployment.warnings[0]
    written = {"SERVING_CERTIFICATE_FILE": "c.pem", "SERVING_PRIVATE_KEY_FILE": "k.pem"}
    assert resolved("org/m", environ=written).server.scheme == "http"


def test_management_for_others_needs_a_key(resolved):
    environ = {"SERVING_MANAGEMENT_ADDRESS": "http://0.0.0.0:8081"}
    assert "nothing listens on 0.0.0.0 port 8081" in resolved("org/m", environ=environ).warnings[0]
    environ["SERVING_ADMIN_KEY"] = "boss"
    assert not resolved("org/m", environ=environ).warnings
