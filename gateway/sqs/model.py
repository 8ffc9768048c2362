"""The actions, their requests and their answers, read from botocore's service models.

Each request's shape becomes a msgspec struct, so that bodies are decoded and checked in one step.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import msgspec
from botocore.loaders import Loader
from botocore.model import ListShape, MapShape, ServiceModel, Shape, StructureShape

from gateway.sqs.errors import SqsError, missing

SERVICE, API_VERSION = "sqs", "2012-11-05"
#: The service that some tools call before they use SQS, and its version.
STS, STS_VERSION = "sts", "2011-06-15"
_IDENTITY = "GetCallerIdentity"

_ABSENT = re.compile(r"Object missing required field `(?P<name>\w+)`(?: - at `(?P<path>[^`]*)`)?")
_NULL = re.compile(r"Expected `[^`]*`, got `null` - at `(?P<path>[^`]*)`")
_STEP = re.compile(r"\.(?P<member>\w+)|\[(?P<index>\d+|\.\.\.)\]")
_SCALARS = {"string": str, "integer": int, "long": int, "boolean": bool, "blob": bytes}


@cache
def service_model(service: str = SERVICE, version: str = API_VERSION) -> ServiceModel:
    """The model of a service."""
    return ServiceModel(Loader().load_service_model(service, "service-2", version), service)


def _type_of(shape: Shape, known: dict[str, Any]) -> Any:
    if isinstance(shape, StructureShape):
        made = known.get(shape.name)
        if made is None:
            required = set(shape.required_members)
            fields: list[Any] = []
            for name, member in shape.members.items():
                kind = _type_of(member, known)
                fields.append((name, kind) if name in required else (name, kind | None, None))
            made = known[shape.name] = msgspec.defstruct(shape.name, fields, kw_only=True, module=__name__)
        return made
    if isinstance(shape, ListShape):
        return list[_type_of(shape.member, known)]  # type: ignore[misc]
    if isinstance(shape, MapShape):
        return dict[str, _type_of(shape.value, known)]  # type: ignore[misc]
    return _SCALARS[shape.type_name]


class Action:
    """One action: its name, the shapes of its request and its answer, and the decoder of requests.

    Requests are signed for its ``service``.
    """

    def __init__(
        self,
        name: str,
        input_shape: StructureShape,
        output_shape: StructureShape | None,
        kind: type,
        service: str = SERVICE,
    ) -> None:
        self.name = name
        self.service = service
        self.input = input_shape
        self.output = output_shape
        self._kind = kind
        self._decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(kind)

    def of_json(self, body: bytes) -> Any:
        """Decode the request in a JSON body. Raises `SqsError`."""
        try:
            return self._decoder.decode(body or b"{}")
        except msgspec.ValidationError as exc:
            raise self._problem(exc) from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
            raise SqsError("Serialization", f"The body is not JSON: {exc}") from None

    def of_texts(self, parameters: dict[str, Any]) -> Any:
        """Decode the request in parameters that are all text. Raises `SqsError`."""
        try:
            return msgspec.convert(parameters, self._kind, strict=False)
        except msgspec.ValidationError as exc:
            error = self._problem(exc)
            name = "InvalidParameterValue" if error.name == "Serialization" else error.name
            raise SqsError(name, str(error)) from None

    def _problem(self, error: Exception) -> SqsError:
        absent = _absent(self.input, str(error))
        return missing(absent) if absent is not None else SqsError("Serialization", f"{error}")


def _absent(shape: Shape, error: str) -> str | None:
    """The required member that msgspec says is absent or null; None for other errors.

    It is read from the error, because finding it in the request would need another decoding.
    """
    found = _ABSENT.fullmatch(error)
    if found is not None:
        return _member_of(shape, found["path"] or "$", found["name"])[0]
    found = _NULL.fullmatch(error)
    if found is not None:
        path, _, name = found["path"].rpartition(".")
        absent, is_required = _member_of(shape, path, name)
        return absent if is_required else None
    return None


def _member_of(shape: Shape, path: str, name: str) -> tuple[str, bool]:
    """AWS's name of a member, from msgspec's path, and True if it is required."""
    named = []
    for part in _STEP.finditer(path):
        if part["member"] is not None:
            named.append(part["member"])
            shape = shape.members.get(part["member"], shape) if isinstance(shape, StructureShape) else shape
        else:
            if part["index"].isdigit():
                named.append(str(int(part["index"]) + 1))
            if isinstance(shape, ListShape):
                shape = shape.member
            elif isinstance(shape, MapShape):
                shape = shape.value
    required = shape.required_members if isinstance(shape, StructureShape) else ()
    return ".".join((*named, name)), name in required


@cache
def actions() -> dict[str, Action]:
    """All actions of SQS by name."""
    known: dict[str, Any] = {}
    return {name: _action(service_model(), name, known) for name in service_model().operation_names}


@cache
def identity_action() -> Action:
    """The action of STS."""
    return _action(service_model(STS, STS_VERSION), _IDENTITY, {})


def _action(model: ServiceModel, name: str, known: dict[str, Any]) -> Action:
    operation = model.operation_model(name)
    shape = operation.input_shape
    return Action(name, shape, operation.output_shape, _type_of(shape, known), model.service_name)


@cache
def enum_of(shape_name: str) -> frozenset[str]:
    """The values that a string shape may have."""
    return frozenset(service_model().shape_for(shape_name).enum)
