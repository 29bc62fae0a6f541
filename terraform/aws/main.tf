# All of it: the bucket, the index, the ways to both, and who may do what.

locals {
  is_directory = var.express_zone_id != null
  bucket       = one(concat(module.express_bucket[*], module.bucket[*]))
  # Not the passwords themselves: whose they are is no secret.
  with_password = nonsensitive(toset(keys(var.redis_passwords)))
}

module "bucket" {
  source = "../modules/bucket"
  count  = local.is_directory ? 0 : 1

  name          = var.name
  prefix        = var.prefix
  expire_days   = var.expire_days
  kms_key_arn   = var.kms_key_arn
  force_destroy = var.force_destroy
  tags          = var.tags
}

module "express_bucket" {
  source = "../modules/express-bucket"
  count  = local.is_directory ? 1 : 0

  name          = var.name
  zone_id       = var.express_zone_id
  prefix        = var.prefix
  expire_days   = var.expire_days
  kms_key_arn   = var.kms_key_arn
  force_destroy = var.force_destroy
}

module "network" {
  source = "../modules/network"

  name                      = var.name
  vpc_id                    = var.vpc_id
  client_security_group_ids = var.client_security_group_ids
  route_table_ids           = var.route_table_ids
  has_express               = local.is_directory
  tags                      = var.tags
}

module "roles" {
  source = "../modules/roles"

  name         = var.name
  bucket_arn   = local.bucket.arn
  is_directory = local.is_directory
  prefix       = var.prefix
  tenants      = var.tenants
  kms_key_arn  = var.kms_key_arn
  trust_policy = var.trust_policy
  tags         = var.tags
}

module "index" {
  source = "../modules/index"

  name               = var.name
  subnet_ids         = var.subnet_ids
  security_group_ids = [module.network.index_security_group_id]
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
  passwords                  = var.redis_passwords
  auth_token                 = var.redis_auth_token
  auth_token_update_strategy = var.redis_auth_token_update_strategy
  tags                       = var.tags
}

locals {
  server_kind = var.redis_shards > 1 ? "cluster" : "single"
  # The names that objkv access prints.
  user_names = {
    for key, grant in module.roles.grants :
    key => "${module.roles.places[grant.tenant].redis_prefix}-${grant.role}"
  }
}
