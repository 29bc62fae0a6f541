# One policy for each role and tenant, and an IAM role with it where it is said who may take it on. No
# access keys are made here.

locals {
  roles   = ["reader", "writer", "sweeper"]
  tenants = length(var.tenants) == 0 ? toset([""]) : var.tenants

  places = {
    for tenant in local.tenants : tenant => {
      tenant       = tenant
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
  source   = "../rights"
  for_each = local.places

  bucket_arn   = var.bucket_arn
  is_directory = var.is_directory
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

resource "aws_iam_role" "role" {
  for_each = var.trust_policy == null ? {} : local.grants

  name               = "${var.name}-${each.key}"
  description        = "objkv: a ${each.value.role}"
  assume_role_policy = var.trust_policy.json
  tags               = var.tags
}

resource "aws_iam_role_policy_attachment" "role" {
  for_each = aws_iam_role.role

  role       = each.value.name
  policy_arn = aws_iam_policy.role[each.key].arn
}
