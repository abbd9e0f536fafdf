"""Makes what follows from the chart's values.yaml: its schema, the page that shows the values, and plain manifests.

    python helm/make_files.py          # writes all of it; the manifests need helm on the PATH

A value's comment is its documentation, in the page and in the schema. A line `@schema {…}` in it says more of what the
value may be, in JSON Schema's words, with ours: `options` are those of a command, `items: pool` are pools of workers,
`items: model` models that have some. Empty maps are open, others closed, so that a value with a wrong name is refused.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from diptych.bootstrap.main import BootstrapConfig
from diptych.cli.planning.config import PlannerConfig
from diptych.common.config import described
from diptych.engine.frontend.config import WorkerConfig
from diptych.router.config import RENAMED, RouterConfig

ROOT: Final = Path(__file__).parents[1]
CHART: Final = ROOT / "helm" / "diptych"
VALUES: Final = CHART / "values.yaml"
MANIFESTS: Final = ("cpu", "gpu", "rdma")

Json = dict[str, Any]

CONFIGS: Final[Mapping[str, type[Any]]] = {
    "router": RouterConfig,
    "bootstrap": BootstrapConfig,
    "worker": WorkerConfig,
    "planner": PlannerConfig,
}
OURS: Final = frozenset(  # options that the chart sets itself
    [
        *(
            "model",
            "load_format",
            "max_model_len",
            "served_model_name",
            "further_models",
            "chat_template",
            "drain_s",
            "pool",
            "pod_name",
            "log_format",
            "log_level",
            "endpoint_slices",
            "console",
            "console_text",
            "platform",
            "act",
            "selector",
            "step_model",
            "file_cache_dir",
            "file_cache_mib",
            "declared_file",
            "nnodes",
            "node_rank",
            "leader",
            "batch_store",
        ),
        *("bootstrap", "host", "port", "http_port", "grpc_port", "metrics_port", "health_port", "advertise_host"),
        *("auth_token_file", "tls_cert", "tls_key", "tls_ca", "tls_name", "insecure", "api_keys_file", "open_api"),
    ]
)
TYPES: Final = {int: "integer", float: "number", bool: "boolean"}
POOL_NAME: Final = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]{0,18}[a-z0-9])?$", "description": "Its name."}

POOLS: Final = {"type": "array", "items": {"$ref": "#/definitions/pool"}, "description": "Pools of this role."}
MODEL: Final = {
    "type": "object",
    "additionalProperties": False,
    "required": ["path"],
    "properties": {
        "path": {"type": "string", "pattern": "^[^=,]+$", "description": "Folder or GGUF file, as model.name."},
        "servedName": {"type": "string", "pattern": "^[^=, ]*$", "description": "What clients call it. Empty: its id."},
        **dict.fromkeys(("prefill", "decode", "unified", "encode"), POOLS),
    },
}

HEADER: Final = """\
# Made of helm/diptych with ci/{name}-values.yaml by `make chart`; change those instead. Before `kubectl apply`:
#
#   kubectl create namespace diptych
#   diptych tokens tokens
#   kubectl -n diptych create secret generic diptych-token --from-file=tokens
#   diptych keys new me > keys.toml
#   kubectl -n diptych create secret generic diptych-api-keys --from-file=keys.toml
#
# and name your clients in the NetworkPolicy of routers, beside components `router` and `test`: nobody else gets in.
"""


@dataclass(frozen=True, slots=True)
class Value:
    """One entry of values.yaml, as it stands there."""

    path: str
    default: Any
    comment: str
    schema: Json  # what its `@schema` line says
    children: tuple[Value, ...]  # of a map that is not open


def values(text: str) -> tuple[Value, ...]:
    """Read values.yaml with its comments."""
    return tuple(_entries(yaml.compose(text, yaml.SafeLoader), text.splitlines(), ""))


def _entries(node: Any, lines: list[str], prefix: str) -> Iterator[Value]:
    for key, child in node.value:
        comment, schema = _comment_above(lines, key.start_mark.line)
        is_closed = isinstance(child, yaml.MappingNode) and bool(child.value) and "additionalProperties" not in schema
        path = f"{prefix}{key.value}"
        children = tuple(_entries(child, lines, f"{path}.")) if is_closed else ()
        yield Value(path, yaml.safe_load(yaml.serialize(child)), comment, schema, children)


def _comment_above(lines: list[str], number: int) -> tuple[str, Json]:
    first = number
    while first and lines[first - 1].lstrip().startswith("#"):
        first -= 1
    texts = [line.lstrip()[1:].strip() for line in lines[first:number]]
    schemas = [yaml.safe_load(text.removeprefix("@schema")) for text in texts if text.startswith("@schema {")]
    return " ".join(text for text in texts if not text.startswith("@schema {")), schemas[0] if schemas else {}


def schema(entries: tuple[Value, ...]) -> Json:
    """Return the JSON Schema of the values."""
    top = {entry.path: _schema_of(entry) for entry in entries}
    pool = {"type": "object", "additionalProperties": False, "required": ["name"]}
    pool["properties"] = {"name": POOL_NAME, **_nullable(top["workers"]["properties"])}
    options = {f"{name}Options": _options_schema(config) for name, config in CONFIGS.items()}
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Values of the chart diptych",
        "type": "object",
        "additionalProperties": False,
        "properties": {**top, "global": {"type": "object", "description": "Helm's own."}},
        "definitions": {"pool": pool, "model": MODEL, **options},
    }


def _nullable(properties: Json) -> Json:
    """A pool may take away what an open map of `workers` has."""
    return {name: _with_null(told) for name, told in properties.items()}


def _with_null(told: Json) -> Json:
    if told.get("additionalProperties") == {"type": "string"}:
        return {**told, "additionalProperties": {"type": ["string", "null"]}}
    return {**told, "properties": _nullable(told["properties"])} if "properties" in told else told


def _schema_of(value: Value) -> Json:
    told = dict(value.schema)
    if "options" in told:
        return {"$ref": f"#/definitions/{told['options']}Options"}
    if told.get("items") in ("pool", "model"):
        told["items"] = {"$ref": f"#/definitions/{told['items']}"}
    found: Json = {"type": _type_of(value.default)} if "enum" not in told else {}
    if value.children:
        found["additionalProperties"] = False
        found["properties"] = {child.path.rpartition(".")[2]: _schema_of(child) for child in value.children}
    words = {"description": value.comment} if value.comment else {}
    return {**words, **found, **told}


def _type_of(default: object) -> str:
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return kinds.get(type(default), "null")


def _options_schema(config: type[Any]) -> Json:
    told: Json = {_camel(name): {**_option_schema(kind), "description": text} for name, kind, text in _options(config)}
    for name, now in (RENAMED if config is RouterConfig else {}).items():
        told[_camel(name)] = {"description": f"Refused, with words: it is {_camel(now)} now."}
    return {"type": "object", "additionalProperties": False, "properties": told}


def _options(config: type[Any]) -> Iterator[tuple[str, Any, str]]:
    return ((name, kind, text) for name, kind, text in described(config) if name not in OURS)


def _option_schema(kind: Any) -> Json:
    """Null leaves an option out, as a pool may wish that has those of `workers` too."""
    if typing.get_origin(kind) is typing.Literal:
        return {"enum": [*typing.get_args(kind), None]}
    if typing.get_origin(kind) is tuple:
        return {"type": ["array", "null"], "items": {"type": "string"}}
    return {"type": [TYPES.get(kind, "string"), "null"]}


def _camel(name: str) -> str:
    return re.sub("_(.)", lambda found: found[1].upper(), name)


def page(entries: tuple[Value, ...]) -> str:
    """Return docs/operations/chart-values.md."""
    parts = [
        "# Values of the chart\n\nMade from `helm/diptych/values.yaml` by `make chart`. What `options` may hold is "
        "what the commands' `--help` lists, in camelCase: see [Tuning](tuning.md)."
    ]
    loose = [entry for entry in entries if not entry.children]
    parts.append(_table(loose))
    for entry in entries:
        if entry.children:
            words = f"\n\n{entry.comment}" if entry.comment else ""
            parts.append(f"## {entry.path}{words}\n\n{_table(list(_leaves(entry)))}")
    return "\n\n".join(parts) + "\n"


def _leaves(entry: Value) -> Iterator[Value]:
    for child in entry.children:
        if child.children and child.comment:
            yield child
        yield from _leaves(child) if child.children else (child,)


def _table(entries: list[Value]) -> str:
    rows = [f"| `{entry.path}` | {_default(entry)} | {_words(entry)} |" for entry in entries]
    return "\n".join(["| value | default | what |", "|---|---|---|", *rows])


def _default(entry: Value) -> str:
    return "" if entry.children else f"`{json.dumps(entry.default)}`"


def _words(entry: Value) -> str:
    choices = [json.dumps(each) for each in entry.schema.get("enum", ())]
    told = [entry.comment] if entry.comment else []
    return " ".join([*told, *([f"One of {', '.join(choices)}."] if choices else [])]).replace("|", "\\|")


def manifest(name: str, *, helm: str = "helm") -> str:
    """Render the chart with the values of `ci/` as plain YAML, without what only Helm understands."""
    secrets = (
        "auth.token.existingSecret=diptych-token,auth.token.perMember=true,apiKeys.existingSecret=diptych-api-keys"
    )
    command = [helm, "template", "diptych", str(CHART), "--namespace=diptych", "--kube-version=1.28"]
    command += [
        f"--values={CHART / 'ci' / f'{name}-values.yaml'}",
        f"--set={secrets},tests.enabled=false",
    ]
    rendered = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    lines = rendered.splitlines(keepends=True)
    helms = ("# Source:", "helm.sh/chart:", "app.kubernetes.io/managed-by:")
    return HEADER.format(name=name) + "".join(line for line in lines if not line.lstrip().startswith(helms))


def made() -> dict[Path, str]:
    """Return what values.yaml alone makes, by the file that holds it."""
    entries = values(VALUES.read_text())
    return {
        CHART / "values.schema.json": json.dumps(schema(entries), indent=2, ensure_ascii=False) + "\n",
        ROOT / "docs" / "operations" / "chart-values.md": page(entries),
    }


def main() -> int:
    for path, text in made().items():
        path.write_text(text)
    for name in MANIFESTS:
        (ROOT / "manifests" / f"{name}.yaml").write_text(manifest(name))
    return 0


if __name__ == "__main__":
    sys.exit(main())
