"""Stands in for the hashicorp/aws provider where no registry can be asked.

It knows the schemas of ``schemas.py`` and no AWS: ``terraform validate`` finds what the provider
would not understand, ``terraform test`` mocks it, and plans and applies of it make nothing, but
tell what would be changed and what made anew. Terraform starts it; see
``scripts/terraform_check.sh``.
"""

from typing import Any, ClassVar

import schemas
from tf.iface import DataSource, Provider, Resource
from tf.runner import run_provider
from tf.schema import Schema
from tf.types import Bool, List, Map, Number, Unknown


class _Nothing(Resource):
    """A resource of which only the state exists."""

    name: ClassVar[str]
    schema: ClassVar[Schema]

    def __init__(self, provider: Provider) -> None:
        pass

    @classmethod
    def get_name(cls) -> str:
        return cls.name

    @classmethod
    def get_schema(cls) -> Schema:
        return cls.schema

    def validate(self, diags: Any, type_name: str, config: dict[str, Any]) -> None:
        pass

    def create(self, context: Any, planned: dict[str, Any]) -> dict[str, Any]:
        return _made(self.name, self.schema, planned)

    def read(self, context: Any, current: dict[str, Any]) -> dict[str, Any]:
        return current

    def update(
        self, context: Any, current: dict[str, Any], planned: dict[str, Any]
    ) -> dict[str, Any]:
        return _made(self.name, self.schema, planned)

    def delete(self, context: Any, current: dict[str, Any]) -> None:
        pass


class _Said(DataSource):
    """A data source that says the same to everybody."""

    name: ClassVar[str]
    schema: ClassVar[Schema]

    def __init__(self, provider: Provider) -> None:
        pass

    @classmethod
    def get_name(cls) -> str:
        return cls.name

    @classmethod
    def get_schema(cls) -> Schema:
        return cls.schema

    def validate(self, diags: Any, type_name: str, config: dict[str, Any]) -> None:
        pass

    def read(self, context: Any, config: dict[str, Any]) -> dict[str, Any]:
        said = {name: value for name, value in config.items() if value is not None}
        return _made(self.name, self.schema, config | schemas.SAID[self.name] | said)


def _made(name: str, schema: Schema, planned: dict[str, Any]) -> dict[str, Any]:
    """``planned`` with a value for what AWS would have told."""
    found = dict(planned)
    for one in schema.attributes:
        value = found.get(one.name)
        if one.computed and (value is None or value is Unknown):
            found[one.name] = _value(name, one)
    return found


def _value(name: str, attribute: Any) -> Any:
    kind = attribute.type
    if (name, attribute.name) in schemas.DEFAULTS:
        return schemas.DEFAULTS[name, attribute.name]
    if isinstance(kind, Bool):
        return False
    if isinstance(kind, Number):
        return 0
    if isinstance(kind, Map):
        return {}
    if isinstance(kind, List):
        return []
    return f"{name}-{attribute.name}".replace("_", "-")


def _classes(base: type, found: dict[str, Schema]) -> list[Any]:
    return [type(name, (base,), {"name": name, "schema": schema}) for name, schema in found.items()]


class StandIn(Provider):
    """The provider as far as Terraform sees it."""

    def get_model_prefix(self) -> str:
        return "aws_"

    def full_name(self) -> str:
        return "registry.terraform.io/hashicorp/aws"

    def get_provider_schema(self, diags: Any) -> Schema:
        return schemas.PROVIDER

    def validate_config(self, diags: Any, config: dict[str, Any]) -> None:
        pass

    def configure_provider(self, diags: Any, config: dict[str, Any]) -> None:
        pass

    def get_resources(self) -> list[Any]:
        return _classes(_Nothing, schemas.RESOURCES)

    def get_data_sources(self) -> list[Any]:
        return _classes(_Said, schemas.DATA_SOURCES)

    def new_resource(self, kind: Any) -> Any:
        return kind(self)

    def new_data_source(self, kind: Any) -> Any:
        return kind(self)


if __name__ == "__main__":
    run_provider(StandIn())
