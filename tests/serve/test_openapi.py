"""The OpenAPI document says all that a client in another language needs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi")

from fastapi.routing import APIRoute

from paceline.serve import app
from paceline.serve.service import Service
from paceline.tokens import digest


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Service:
    return Service(tmp_path_factory.mktemp("service"))


@pytest.fixture(scope="module")
def document(service: Service) -> dict[str, Any]:
    return dict(app.make(service, digest("0123456789abcdef")).openapi())


def operations(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield f"{method.upper()} {path}", operation


def named(document: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    """The schema itself, of which there may be only the name."""
    if "$ref" in schema:
        return dict(document["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]])
    return schema


def test_every_route_of_the_api_is_in_the_document(service: Service, document: dict[str, Any]) -> None:
    routers = {"/v1": app._jobs(service), "/v1/jobs/{job}/workers": app._workers(service)}
    found = {
        f"{method} {prefix}{route.path}"
        for prefix, router in routers.items()
        for route in router.routes
        if isinstance(route, APIRoute)
        for method in route.methods
    }
    assert len(found) == 9
    assert found | {"GET /metrics"} == {name for name, _ in operations(document)}


def test_every_operation_has_summary_description_and_own_id(document: dict[str, Any]) -> None:
    ids = []
    for name, operation in operations(document):
        assert operation["summary"], name
        assert operation["description"].endswith("."), name
        assert operation["security"], name
        ids.append(operation["operationId"])
    assert len(set(ids)) == len(ids)


def test_every_parameter_is_described_and_bounded(document: dict[str, Any]) -> None:
    for name, operation in operations(document):
        given = operation.get("parameters", [])
        in_path = {each["name"] for each in given if each["in"] == "path"}
        assert in_path == {part[1:-1] for part in name.split("/") if part.startswith("{")}, name
        for each in given:
            assert each["description"].endswith("."), (name, each["name"])
            kinds = each["schema"].get("anyOf", [each["schema"]])
            assert all("pattern" in kind or {"minimum", "maximum"} <= kind.keys() or kind["type"] == "null"
                       for kind in kinds), (name, each["name"])  # fmt: skip


def test_every_answer_has_a_schema_and_every_error_a_message(document: dict[str, Any]) -> None:
    for name, operation in operations(document):
        answers = operation["responses"]
        assert any(status.startswith("2") for status in answers), name
        assert {"400", "401", "405", "408", "413", "415", "422", "500"} <= answers.keys(), name
        if "{worker}" in name:
            assert {"403", "404", "409", "410"} <= answers.keys(), name
        for status, answer in answers.items():
            assert answer["description"], (name, status)
            if status == "204":
                assert "content" not in answer, name
                continue
            ((_, content),) = answer["content"].items()
            assert named(document, content["schema"]).get("type"), (name, status)
            if status >= "400":
                assert content["schema"] == {"$ref": "#/components/schemas/Error"}, (name, status)


def test_every_body_is_json_with_a_schema(document: dict[str, Any]) -> None:
    taken = 0
    for name, operation in operations(document):
        if "requestBody" in operation:
            ((kind, content),) = operation["requestBody"]["content"].items()
            assert (kind, operation["requestBody"]["required"]) == ("application/json", True), name
            assert named(document, content["schema"])["additionalProperties"] is False, name
            taken += 1
    assert taken == 4


def test_every_field_is_described(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    assert not {"HTTPValidationError", "ValidationError"} & schemas.keys()
    missing = [
        f"{name}.{field}"
        for name, schema in schemas.items()
        for field, about in schema["properties"].items()
        if not (about.get("description") or "").endswith(".")
    ]
    assert not missing
    assert all(schema["description"] for schema in schemas.values())
