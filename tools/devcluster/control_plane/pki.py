"""Certificates of one cluster: two authorities, the API server's own, one per client, and the service-account key.

Made by openssl, EC P-256, good for some days. Used by the parts that need a certificate. Knows nothing of processes.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

DAYS = "30"
CONFIG = """\
[req]
distinguished_name = name
x509_extensions = extensions
prompt = no
[name]
{name}
[extensions]
basicConstraints = critical,CA:{authority}
keyUsage = critical,digitalSignature,{usage}
{more}
"""


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate and its key."""

    certificate: Path
    key: Path


class Pki:
    """Makes certificates in a folder, and keeps those that are there."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def ca(self) -> Pair:
        return self._authority("ca")

    @property
    def front_proxy_ca(self) -> Pair:
        return self._authority("front-proxy-ca")

    def client(self, user: str, group: str = "", *, by: Pair | None = None) -> Pair:
        """Return a client certificate: Kubernetes reads the user from CN and the group from O."""
        name = f"CN = {user}" + (f"\nO = {group}" if group else "")
        return self._make(
            user.replace(":", "-"), name, "extendedKeyUsage = clientAuth", by or self.ca
        )

    def server(
        self, file: str, names: Sequence[str], addresses: Sequence[str], user: str = ""
    ) -> Pair:
        """Return a server's certificate for DNS names and IP addresses."""
        listed = [f"DNS:{name}" for name in names] + [f"IP:{address}" for address in addresses]
        more = f"extendedKeyUsage = serverAuth,clientAuth\nsubjectAltName = {','.join(listed)}"
        return self._make(file, f"CN = {user or file}", more, self.ca)

    def signing_pair(self, file: str) -> Pair:
        """Return a key pair without a certificate: `certificate` is the public key."""
        pair = self._pair(file)
        if not pair.key.exists():
            curve = ("-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256")
            _openssl("genpkey", *curve, "-out", str(pair.key))
            _openssl("pkey", "-in", str(pair.key), "-pubout", "-out", str(pair.certificate))
        return pair

    def _authority(self, file: str) -> Pair:
        return self._make(file, f"CN = modelswarm-test-{file}", "", None)

    def _make(self, file: str, name: str, more: str, by: Pair | None) -> Pair:
        pair = self._pair(file)
        if pair.key.exists():
            return pair
        usage = "keyEncipherment" if by else "keyCertSign,cRLSign"
        config = self._folder / f"{file}.cnf"
        authority = "FALSE" if by else "TRUE"
        config.write_text(CONFIG.format(name=name, authority=authority, usage=usage, more=more))
        signer = ("-CA", str(by.certificate), "-CAkey", str(by.key)) if by else ()
        _openssl(
            *("req", "-x509", "-nodes", "-days", DAYS, "-config", str(config), *signer),
            *("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-keyout", str(pair.key), "-out", str(pair.certificate)),
        )
        return pair

    def _pair(self, file: str) -> Pair:
        return Pair(self._folder / f"{file}.crt", self._folder / f"{file}.key")


def _openssl(*words: str) -> None:
    done = subprocess.run(("openssl", *words), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"openssl {words[0]} failed: {done.stderr}")
