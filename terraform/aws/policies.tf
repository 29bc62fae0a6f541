# One policy for each role and tenant. Attach them to the roles of the pods or instances; no access
# keys are made here.

locals {
  roles   = ["reader", "writer", "sweeper"]
  tenants = length(var.tenants) == 0 ? toset([""]) : var.tenants

  places = {
    for tenant in local.tenants : tenant => {
      prefix       = join("/", compact([var.prefix, tenant]))
      redis_prefix = join("-", compact(["objkv", tenant]))
    }
  }

  grants = {
    for pair in setproduct(local.tenants, local.roles) :
    join("-", compact(pair)) => { tenant = pair[0], role = pair[1] }
  }
}

module "rights" {
  source   = "./rights"
  for_each = local.places

  bucket_arn   = aws_s3_bucket.bulk.arn
  prefix       = each.value.prefix
  redis_prefix = each.value.redis_prefix
  kms_key_arn  = var.kms_key_arn
}

resource "aws_iam_policy" "role" {
  for_each = local.grants

  name        = "${var.name}-${each.key}"
  description = "objkv: least rights of a ${each.value.role}"
  policy      = module.rights[each.value.tenant].policies[each.value.role]
  tags        = var.tags
}
