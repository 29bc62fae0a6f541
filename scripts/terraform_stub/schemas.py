"""What the resources and data sources that ``terraform/`` uses look like in hashicorp/aws.

Written down from the provider's source and documentation, version 6 (2026), and only for what the
modules name: whatever is not here is an error, as a misspelt name would be. Attributes that cannot
be changed without making the resource anew are marked, so that plans show it.
"""

from collections.abc import Iterable
from typing import Final

from tf.blocks import SetNestedBlock
from tf.gen import tfplugin_pb2 as pb
from tf.schema import Attribute, Block, NestedBlock, Schema
from tf.types import Bool, List, Map, Number, Set, String, TfType

S, N, B = String(), Number(), Bool()
Part = Attribute | NestedBlock


class ListBlock(SetNestedBlock):
    """A block that comes in a given order, as most of the provider's do."""

    def to_pb(self) -> pb.Schema.NestedBlock:
        """Of the kind that the framework has no name for."""
        nesting = pb.Schema.NestedBlock.NestingMode.LIST
        return pb.Schema.NestedBlock(
            type_name=self.type_name, block=self.block.to_pb(), nesting=nesting
        )


def need(name: str, kind: TfType = S, *, fixed: bool = False) -> Attribute:
    """Has to be given; ``fixed``: a change makes the resource anew."""
    return Attribute(name, kind, required=True, requires_replace=fixed)


def may(
    name: str, kind: TfType = S, *, fixed: bool = False, known: bool = True, secret: bool = False
) -> Attribute:
    """May be given; not ``known``: AWS says what it is otherwise."""
    return Attribute(
        name,
        kind,
        optional=True,
        computed=not known,
        requires_replace=fixed,
        sensitive=secret,
    )


def told(name: str, kind: TfType = S) -> Attribute:
    """Is known only when it has been made."""
    return Attribute(name, kind, computed=True)


def block(name: str, *parts: Part) -> NestedBlock:
    """Blocks in their order."""
    return ListBlock(name, Block(*_sorted(parts)))


def blocks(name: str, *parts: Part) -> NestedBlock:
    """Blocks of which the order means nothing."""
    return SetNestedBlock(name, Block(*_sorted(parts)))


def schema(*parts: Part) -> Schema:
    """Every resource and data source has an id."""
    attributes, nested = _sorted(parts)
    return Schema(attributes=[*attributes, told("id")], version=0, block_types=nested)


def tagged(*parts: Part) -> Schema:
    """With tags, those of the provider's own among them."""
    return schema(*parts, may("tags", Map(S)), told("tags_all", Map(S)), told("arn"))


def _sorted(parts: Iterable[Part]) -> tuple[list[Attribute], list[NestedBlock]]:
    found = list(parts)
    return (
        [part for part in found if isinstance(part, Attribute)],
        [part for part in found if isinstance(part, NestedBlock)],
    )


def _principals(name: str) -> NestedBlock:
    return blocks(name, need("type"), need("identifiers", Set(S)))


_BUCKET = need("bucket", fixed=True)

PROVIDER: Final = Schema(
    attributes=[may("region"), may("profile"), may("allowed_account_ids", Set(S))],
    block_types=[block("default_tags", may("tags", Map(S)))],
)

RESOURCES: Final = {
    # S3
    "s3_bucket": tagged(
        may("bucket", fixed=True, known=False),
        may("force_destroy", B),
        told("bucket_domain_name"),
        told("bucket_regional_domain_name"),
    ),
    "s3_directory_bucket": schema(
        _BUCKET,
        may("data_redundancy", fixed=True, known=False),
        may("force_destroy", B, known=False),
        may("type", fixed=True, known=False),
        told("arn"),
        block("location", need("name", fixed=True), may("type", fixed=True, known=False)),
    ),
    "s3_bucket_public_access_block": schema(
        _BUCKET,
        may("block_public_acls", B),
        may("block_public_policy", B),
        may("ignore_public_acls", B),
        may("restrict_public_buckets", B),
    ),
    "s3_bucket_ownership_controls": schema(_BUCKET, block("rule", need("object_ownership"))),
    "s3_bucket_server_side_encryption_configuration": schema(
        _BUCKET,
        may("expected_bucket_owner", fixed=True),
        blocks(
            "rule",
            may("bucket_key_enabled", B),
            block(
                "apply_server_side_encryption_by_default",
                need("sse_algorithm"),
                may("kms_master_key_id"),
            ),
        ),
    ),
    "s3_bucket_lifecycle_configuration": schema(
        _BUCKET,
        may("transition_default_minimum_object_size", known=False),
        block(
            "rule",
            need("id"),
            need("status"),
            block("expiration", may("date"), may("days", N)),
            block("abort_incomplete_multipart_upload", may("days_after_initiation", N)),
            block(
                "filter",
                may("prefix"),
                may("object_size_greater_than", N),
                may("object_size_less_than", N),
                block(
                    "and",
                    may("prefix"),
                    may("object_size_greater_than", N),
                    may("object_size_less_than", N),
                    may("tags", Map(S)),
                ),
            ),
        ),
    ),
    "s3_bucket_policy": schema(_BUCKET, need("policy")),
    # ElastiCache
    "elasticache_subnet_group": tagged(
        need("name", fixed=True), may("description"), need("subnet_ids", Set(S)), told("vpc_id")
    ),
    "elasticache_parameter_group": tagged(
        need("name", fixed=True),
        need("family", fixed=True),
        may("description", fixed=True),
        blocks("parameter", need("name"), need("value")),
    ),
    "elasticache_user": tagged(
        need("user_id", fixed=True),
        need("user_name", fixed=True),
        need("engine"),
        need("access_string"),
        may("no_password_required", B),
        may("passwords", Set(S), secret=True),
        block(
            "authentication_mode",
            need("type"),
            may("passwords", Set(S), secret=True),
            told("password_count", N),
        ),
    ),
    "elasticache_user_group": tagged(
        need("user_group_id", fixed=True), need("engine"), may("user_ids", Set(S))
    ),
    "elasticache_replication_group": tagged(
        need("replication_group_id", fixed=True),
        need("description"),
        may("engine", known=False),
        may("engine_version", known=False),
        may("node_type", known=False),
        may("parameter_group_name", known=False),
        may("port", N, fixed=True),
        may("num_node_groups", N, known=False),
        may("num_cache_clusters", N, known=False),
        may("replicas_per_node_group", N, known=False),
        may("automatic_failover_enabled", B),
        may("multi_az_enabled", B),
        may("subnet_group_name", fixed=True, known=False),
        may("security_group_ids", Set(S), known=False),
        may("transit_encryption_enabled", B, known=False),
        may("transit_encryption_mode", known=False),
        may("auth_token", secret=True),
        may("auth_token_update_strategy"),
        may("user_group_ids", Set(S)),
        may("at_rest_encryption_enabled", S, fixed=True, known=False),
        may("kms_key_id", fixed=True),
        may("cluster_mode", known=False),
        may("auto_minor_version_upgrade", S, known=False),
        may("maintenance_window", known=False),
        may("notification_topic_arn"),
        may("snapshot_retention_limit", N),
        may("snapshot_window", known=False),
        may("apply_immediately", B, known=False),
        told("cluster_enabled", B),
        told("primary_endpoint_address"),
        told("reader_endpoint_address"),
        told("configuration_endpoint_address"),
        told("member_clusters", Set(S)),
    ),
    # Networks
    "vpc": tagged(
        may("cidr_block", fixed=True, known=False),
        may("enable_dns_support", B),
        may("enable_dns_hostnames", B, known=False),
    ),
    "default_security_group": tagged(
        may("vpc_id", fixed=True, known=False), told("name"), told("description")
    ),
    "subnet": tagged(
        need("vpc_id", fixed=True),
        may("availability_zone", fixed=True, known=False),
        may("cidr_block", fixed=True),
        may("map_public_ip_on_launch", B),
    ),
    "route_table": tagged(need("vpc_id", fixed=True)),
    "route_table_association": schema(
        need("route_table_id"), may("subnet_id", fixed=True), may("gateway_id", fixed=True)
    ),
    "security_group": tagged(
        may("name", fixed=True, known=False),
        may("description", fixed=True),
        may("vpc_id", fixed=True, known=False),
    ),
    **{
        f"vpc_security_group_{way}_rule": tagged(
            need("security_group_id", fixed=True),
            need("ip_protocol"),
            may("cidr_ipv4"),
            may("cidr_ipv6"),
            may("description"),
            may("from_port", N),
            may("to_port", N),
            may("prefix_list_id"),
            may("referenced_security_group_id"),
            told("security_group_rule_id"),
        )
        for way in ("ingress", "egress")
    },
    "vpc_endpoint": tagged(
        need("vpc_id", fixed=True),
        may("service_name", fixed=True),
        may("vpc_endpoint_type", fixed=True),
        may("route_table_ids", Set(S), known=False),
        may("policy", known=False),
        told("prefix_list_id"),
        told("state"),
    ),
    # IAM and KMS
    "iam_policy": tagged(
        may("name", fixed=True, known=False),
        may("path", fixed=True),
        may("description", fixed=True),
        need("policy"),
        told("policy_id"),
    ),
    "iam_role": tagged(
        may("name", fixed=True, known=False),
        may("path", fixed=True),
        may("description"),
        need("assume_role_policy"),
        may("max_session_duration", N),
        may("permissions_boundary"),
        told("unique_id"),
    ),
    "iam_role_policy_attachment": schema(need("role", fixed=True), need("policy_arn", fixed=True)),
    "kms_key": tagged(
        may("description", known=False),
        may("enable_key_rotation", B),
        may("deletion_window_in_days", N),
        may("policy", known=False),
        told("key_id"),
    ),
}

DATA_SOURCES: Final = {
    "iam_policy_document": schema(
        may("version"),
        told("json"),
        block(
            "statement",
            may("sid"),
            may("effect"),
            may("actions", Set(S)),
            may("resources", Set(S)),
            _principals("principals"),
            blocks("condition", need("test"), need("variable"), need("values", List(S))),
        ),
    ),
    "region": schema(may("region", known=False), told("description"), told("endpoint")),
    "caller_identity": schema(told("account_id"), told("arn"), told("user_id")),
    "availability_zones": schema(may("state"), told("names", List(S)), told("zone_ids", List(S))),
}

SAID: Final = {
    "region": {"id": "eu-central-1", "region": "eu-central-1"},
    "caller_identity": {"id": "123456789012", "account_id": "123456789012"},
    "iam_policy_document": {"json": "{}"},
}
"""What data sources of the stand-in say where no test says something else."""

DEFAULTS: Final = {("elasticache_replication_group", "transit_encryption_mode"): "required"}
"""What AWS chooses, where a plan depends on it."""
