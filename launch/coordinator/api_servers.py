"""Servers that answer JSON: etcd, and Kubernetes' API server with a pod's service account."""

import http.client
import json
import os
import socket
import ssl
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from scalai.core.errors import PeerError, UsageError
from scalai.launch.config.endpoint import join_endpoint

ASK_S = 4.0
"""Time for a server to answer, in seconds."""
ANSWER_BYTES = 1 << 20
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Service account of a pod: ``token``, ``namespace`` and the API server's ``ca.crt``."""
MERGE_PATCH = "application/merge-patch+json"
"""Type of a PATCH with the fields to replace (RFC 7386)."""


class KubernetesApi:
    """Calls to the API server about objects of the pod's namespace.

    Args:
        url: The API server's address.
        account: Folder of the pod's service account. Its token and authority expire, and are read
            anew each time.
        asker: Option in need of it, for messages.

    Raises:
        UsageError: The service account is unusable.
    """

    def __init__(self, url: str, account: Path, asker: str) -> None:
        self.url, self._account = url, account
        try:
            self.namespace = (account / "namespace").read_text().strip()
            ssl.create_default_context(cafile=account / "ca.crt")
        except OSError as error:  # also one of ssl
            raise UsageError(
                f"{asker} needs a pod's service account, and {account} cannot be used: {error}. "
                "Is automountServiceAccountToken off?"
            ) from error

    @classmethod
    def of_pod(cls, asker: str) -> "KubernetesApi":
        """The API server of this pod. Raises ``UsageError`` outside of a pod, or as above."""
        host, port = (os.environ.get(f"KUBERNETES_SERVICE_{word}") for word in ("HOST", "PORT"))
        if host is None:
            raise UsageError(f"{asker} is for pods, and KUBERNETES_SERVICE_HOST is not set.")
        return cls(f"https://{join_endpoint(host, int(port or 443))}", ACCOUNT, asker)

    def ask(
        self,
        about: str,
        method: str,
        api: str,
        kind: str,
        name: str = "",
        content: Mapping[str, Any] | None = None,
        *,
        is_dry: bool = False,
        is_of_cluster: bool = False,
        query: Mapping[str, str] = MappingProxyType({}),
    ) -> tuple[int, dict[str, Any]]:
        """Ask about an object, or without ``name`` about a new one or all. Returns as ``ask_json``.

        Args:
            about: The object, for messages.
            method: ``PATCH`` replaces the fields in ``content``.
            api, kind: API group with version, and plural of the kind.
            is_dry: The server checks and changes nothing.
            is_of_cluster: The object is in no namespace.

        Raises:
            PeerError: As ``ask_json``, or the service account is unreadable.
        """
        try:
            token = (self._account / "token").read_text().strip()
            context = ssl.create_default_context(cafile=self._account / "ca.crt")
        except OSError as error:  # also one of ssl
            raise PeerError(f"the service account of {about} cannot be read: {error}") from error
        within = "" if is_of_cluster else f"/namespaces/{self.namespace}"
        path = f"/apis/{api}{within}/{kind}/{quote(name, safe='')}".rstrip("/")
        headers = {"Authorization": f"Bearer {token}"}
        if method == "PATCH":
            headers["Content-Type"] = MERGE_PATCH
        query = {**query, **({"dryRun": "All"} if is_dry else {})}
        path += f"?{urlencode(query)}" if query else ""
        return ask_json(about, self.url, method, path, content, headers, context)


def ask_json(
    name: str,
    url: str,
    method: str,
    path: str,
    content: Mapping[str, Any] | None,
    headers: Mapping[str, str] = MappingProxyType({}),
    context: ssl.SSLContext | None = None,
) -> tuple[int, dict[str, Any]]:
    """Ask a JSON server. Returns the status and the answer; {} if that is no JSON.

    Raises:
        PeerError: There is no whole answer within ``ASK_S``, or one of over ``ANSWER_BYTES``.
    """
    parts = urlsplit(url)
    assert parts.hostname is not None
    connection = (
        http.client.HTTPSConnection(parts.hostname, parts.port, timeout=ASK_S, context=context)
        if parts.scheme == "https"
        else http.client.HTTPConnection(parts.hostname, parts.port, timeout=ASK_S)
    )

    def cut() -> None:
        with suppress(OSError, AttributeError):
            connection.sock.shutdown(socket.SHUT_RDWR)

    limit = threading.Timer(ASK_S, cut)  # a server may send a byte now and then
    limit.daemon = True
    limit.start()
    try:
        body = None if content is None else json.dumps(content)
        connection.request(method, path, body, {"Content-Type": "application/json", **headers})
        answer = connection.getresponse()
        text = answer.read(ANSWER_BYTES)
        is_whole = not limit.finished.is_set() and not answer.read(1)
    except (OSError, http.client.HTTPException) as error:
        raise PeerError(f"{name} does not answer: {error or type(error).__name__}") from error
    finally:
        limit.cancel()
        connection.close()
    if not is_whole:
        raise PeerError(f"{name} has not answered within {ASK_S:.0f} s and {ANSWER_BYTES} bytes.")
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if answer.status < 300 and not isinstance(found, dict):
        raise PeerError(f"{name} answers {text[:80]!r}, which is torn.")
    return answer.status, found if isinstance(found, dict) else {}
