"""Uploads to the hub of hub_server.py, as huggingface_hub sends them without Xet.

    POST  /api/repos/create                        a new repository; 409 where it is there already
    POST  /api/validate-yaml                       the metadata of a card
    POST  /api/models/OWNER/NAME/preupload/main    which files are large, and which are there
    POST  /OWNER/NAME.git/info/lfs/objects/batch   which large files are missing
    PUT   /lfs/SHA256                              a large file
    POST  /api/models/OWNER/NAME/commit/main       small files, and the names of large ones

Datasets as in hub_server.py.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from hub_server import Hub, _Handler

_PREUPLOAD = re.compile(r"/api/(?:models/)?((?:datasets/)?[^/]+/[^/]+)/preupload/main")
_BATCH = re.compile(r"/((?:datasets/)?[^/]+/[^/]+)\.git/info/lfs/objects/batch")
_COMMIT = re.compile(r"/api/(?:models/)?((?:datasets/)?[^/]+/[^/]+)/commit/main")
_OBJECT = re.compile(r"/lfs/([0-9a-f]{64})")
_LOCK = threading.Lock()
#: Some of the licences that a card may name.
_LICENCES = ("apache-2.0", "cc0-1.0", "cc-by-4.0", "mit", "other")


def answer_upload(handler: _Handler, hub: Hub, path: str) -> None:
    """Answer a POST or PUT."""
    if match := _OBJECT.fullmatch(path):
        _take_object(handler, hub, match[1])
        return
    body = _body(handler)
    token = handler.headers.get("Authorization", "").removeprefix("Bearer ")
    if token not in hub.writers:
        handler.send(401, {"X-Error-Message": "Invalid username or password."})
    elif path == "/api/validate-yaml":
        problems = [{"message": text} for text in _problems(json.loads(body)["content"])]
        answer = json.dumps({"errors": problems, "warnings": []}).encode()
        handler.send(400 if problems else 200, {"Content-Type": "application/json"}, answer)
    elif path == "/api/repos/create":
        _create(handler, hub, token, json.loads(body))
    else:
        _answer_in_repository(handler, hub, token, path, body)


def _answer_in_repository(handler: _Handler, hub: Hub, token: str, path: str, body: bytes) -> None:
    for pattern, answer in ((_PREUPLOAD, _preupload), (_BATCH, _batch), (_COMMIT, _commit)):
        if match := pattern.fullmatch(path):
            if match[1].removeprefix("datasets/").partition("/")[0] != hub.writers[token]:
                handler.send(403, {"X-Error-Message": "You have no write access."})
            else:
                answer(handler, hub, match[1], body)
            return
    handler.send(404)


def _problems(card: str) -> Iterator[str]:
    """What the hub finds wrong with the metadata of a card."""
    found = re.match(r"---\n(.*?)\n---\n", card, re.DOTALL)
    values = yaml.safe_load(found[1]) if found else {}
    if values.get("license", "other") not in _LICENCES:
        yield f'"license" must be one of [{", ".join(_LICENCES)}]'
    base = values.get("base_model", "owner/name")
    if re.fullmatch(r"[\w.-]+/[\w.-]+", base) is None:
        yield f'"base_model" with value "{base}" is not valid. Use a model id from hf.co/models.'
    for entry in values.get("model-index", ()):
        for number, result in enumerate(entry["results"]):
            parts = {"task": ["type"], "dataset": ["name", "type"], "metrics": ["type", "value"]}
            for part, keys in parts.items():
                one = result[part][0] if part == "metrics" else result[part]
                missing = [key for key in keys if one.get(key) is None]
                yield from (f'"results[{number}].{part}.{key}" is required' for key in missing)


def _body(handler: BaseHTTPRequestHandler) -> bytes:
    return handler.rfile.read(int(handler.headers.get("Content-Length", "0")))


def _create(handler: _Handler, hub: Hub, token: str, wish: dict[str, Any]) -> None:
    prefix = "datasets/" if wish.get("type") == "dataset" else ""
    repository = f"{prefix}{wish['organization']}/{wish['name']}"
    url = f"{hub.url}/{repository}"
    if repository in hub.repositories:
        handler.send(409, {"Content-Type": "application/json"}, json.dumps({"url": url}).encode())
    elif wish["organization"] != hub.writers[token]:
        handler.send(403, {"X-Error-Message": "You have no rights under this namespace."})
    else:
        is_private = wish.get("private") or wish.get("visibility") == "private"
        hub.commit(repository, {}, "main", "private" if is_private else "public")
        handler.send_json({"url": url})


def _files(hub: Hub, repository: str) -> dict[str, Any]:
    found = hub.repositories[repository]
    return found.commits[found.names["main"]]


def _preupload(handler: _Handler, hub: Hub, repository: str, body: bytes) -> None:
    from hub_server import stored

    there, answers = _files(hub, repository), []
    for wish in json.loads(body)["files"]:
        name = wish["path"]
        mode = "lfs" if stored(name, b"").large else "regular"
        oid = there[name].oid if name in there else None
        answers.append({"path": name, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
    handler.send_json({"files": answers})


def _batch(handler: _Handler, hub: Hub, repository: str, body: bytes) -> None:
    wishes = json.loads(body)["objects"]
    for wish in wishes:
        if wish["oid"] not in hub.objects:
            wish["actions"] = {"upload": {"href": f"{hub.url}/lfs/{wish['oid']}", "header": {}}}
    handler.send_json({"transfer": "basic", "objects": wishes})


def _take_object(handler: _Handler, hub: Hub, oid: str) -> None:
    with _LOCK:
        breaks = hub.uploads_left == 0
        if hub.uploads_left:
            hub.uploads_left -= 1
    if breaks:
        handler.rfile.read(100)
        handler.reset()
        return
    content = _body(handler)
    assert hashlib.sha256(content).hexdigest() == oid
    hub.objects[oid] = content
    handler.send(200)


def _commit(handler: _Handler, hub: Hub, repository: str, body: bytes) -> None:
    from hub_server import stored

    files = dict(_files(hub, repository))
    for line in map(json.loads, body.splitlines()):
        value = line["value"]
        if line["key"] == "file":
            files[value["path"]] = stored(value["path"], base64.b64decode(value["content"]))
        elif line["key"] == "lfsFile":
            files[value["path"]] = stored(value["path"], hub.objects[value["oid"]])
        elif line["key"] == "deletedFile":
            del files[value["path"]]
    commit = hub.commit(repository, files, "main", hub.repositories[repository].access)
    url = f"{hub.url}/{repository}/commit/{commit}"
    handler.send_json({"success": True, "commitUrl": url, "commitOid": commit})
