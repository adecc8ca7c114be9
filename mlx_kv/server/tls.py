"""TLS: the certificate of the server, and whose certificates clients must show.

Decides that what cannot be used is refused before a model is loaded. uvicorn does the rest.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Certificates:
    """Files in PEM form, by uvicorn's names for them.

    Attributes:
        ssl_certfile: the certificate, and those between it and one that clients know.
        ssl_keyfile: its key; None is in the same file.
        ssl_keyfile_password: of the key, if it has one.
        ssl_ca_certs: who signs the certificates that clients must show; None asks for none.

    Raises:
        ValueError: they cannot be read, or don't go together.
    """

    ssl_certfile: Path
    ssl_keyfile: Path | None = None
    ssl_keyfile_password: str | None = None
    ssl_ca_certs: Path | None = None

    def __post_init__(self) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            # Without a password OpenSSL would ask for one on the terminal.
            context.load_cert_chain(self.ssl_certfile, self.ssl_keyfile, lambda: self.ssl_keyfile_password or "")
        except (OSError, ValueError) as error:
            key = self.ssl_keyfile or self.ssl_certfile
            reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
            raise ValueError(
                f"cannot use the certificate {self.ssl_certfile} with the key in {key}: {reason}; both are PEM files"
            ) from error
        if self.ssl_ca_certs is not None:
            try:
                context.load_verify_locations(self.ssl_ca_certs)
            except OSError as error:
                raise ValueError(f"cannot use the certificates in {self.ssl_ca_certs}: they are no PEM file") from error

    @property
    def of_uvicorn(self) -> dict[str, Any]:
        """What uvicorn is told."""
        told: dict[str, Any] = {name: str(value) for name, value in vars(self).items() if value is not None}
        return told | ({"ssl_cert_reqs": ssl.CERT_REQUIRED} if self.ssl_ca_certs is not None else {})
