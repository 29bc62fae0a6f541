# All of it: the bucket, the index, and who may do what.

data "aws_region" "here" {}

module "bucket" {
  source = "../modules/bucket"

  name            = var.name
  prefix          = var.prefix
  express_zone_id = var.express_zone_id
  expire_days     = var.expire_days
  kms_key_arn     = var.kms_key_arn
  force_destroy   = var.force_destroy
  tags            = var.tags
}

module "roles" {
  source = "../modules/roles"

  name         = var.name
  bucket_arn   = module.bucket.arn
  is_directory = var.express_zone_id != null
  prefix       = var.prefix
  tenants      = var.tenants
  kms_key_arn  = var.kms_key_arn
  trust_policy = var.trust_policy
  tags         = var.tags
}

module "index" {
  source = "../modules/index"

  name               = var.name
  vpc_id             = var.vpc_id
  subnet_ids         = var.subnet_ids
  node_type          = var.redis_node_type
  engine_version     = var.redis_engine_version
  shards             = var.redis_shards
  replicas_per_shard = var.redis_replicas
  kms_key_arn        = var.kms_key_arn

  users = {
    for key in local.with_password : key => {
      user_name     = local.user_names[key]
      access_string = module.roles.access_strings[key][local.server_kind]
    }
  }
  passwords                 = var.redis_passwords
  client_security_group_ids = var.client_security_group_ids
  tags                      = var.tags
}

locals {
  # Not the passwords themselves: whose they are is no secret.
  with_password = nonsensitive(toset(keys(var.redis_passwords)))
  server_kind   = var.redis_shards > 1 ? "cluster" : "single"
  # The names that objkv access prints.
  user_names = {
    for key, grant in module.roles.grants :
    key => "${module.roles.places[grant.tenant].redis_prefix}-${grant.role}"
  }
}
