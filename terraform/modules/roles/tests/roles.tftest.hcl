mock_provider "aws" {}

variables {
  name       = "kv-test"
  bucket_arn = "arn:aws:s3:::kv-test"
  prefix     = "objkv"
}

run "one_tenant_by_default" {
  assert {
    condition     = keys(output.policy_arns) == ["reader", "sweeper", "writer"] && length(output.role_arns) == 0
    error_message = "policies"
  }
  assert {
    condition = alltrue(flatten([
      for policy in aws_iam_policy.role : [
        for one in jsondecode(policy.policy).Statement : [
          for arn in one.Resource : arn == "arn:aws:s3:::kv-test" || startswith(arn, "arn:aws:s3:::kv-test/objkv/")
        ]
      ]
    ]))
    error_message = "somebody gets at another place"
  }
  assert {
    condition     = !strcontains(aws_iam_policy.role["reader"].policy, "PutObject") && !strcontains(aws_iam_policy.role["writer"].policy, "DeleteObject")
    error_message = "more than the role's work"
  }
  assert {
    condition     = startswith(output.access_strings["writer"].single, "on ~objkv:* -@all ")
    error_message = "rights in Redis"
  }
}

run "tenants_are_apart" {
  variables { tenants = ["a", "b"] }

  assert {
    condition     = output.places["b"].prefix == "objkv/b" && output.places["b"].redis_prefix == "objkv-b"
    error_message = "places"
  }
  assert {
    condition     = alltrue([for key, policy in aws_iam_policy.role : !strcontains(policy.policy, "objkv/b") if startswith(key, "a-")])
    error_message = "a reaches into b"
  }
  assert {
    condition     = startswith(output.access_strings["a-reader"].single, "on ~objkv-a:* -@all ")
    error_message = "rights in Redis"
  }
  assert {
    condition     = strcontains(output.access_strings["a-reader"].cluster, "+cluster|slots")
    error_message = "a client of a cluster has to ask where the shards are"
  }
}

run "roles_for_who_may_take_them_on" {
  variables { trust_policy = { json = "{\"trust\": true}" } }

  assert {
    condition     = keys(output.role_arns) == ["reader", "sweeper", "writer"]
    error_message = "roles"
  }
  assert {
    condition = alltrue([
      for key, one in aws_iam_role_policy_attachment.role :
      one.policy_arn == aws_iam_policy.role[key].arn && one.role == "kv-test-${key}"
    ])
    error_message = "a role with the rights of another"
  }
  assert {
    condition     = alltrue([for role in aws_iam_role.role : role.assume_role_policy == "{\"trust\": true}"])
    error_message = "others may take them on"
  }
}

run "a_key_may_be_used_through_s3_alone" {
  variables { kms_key_arn = "arn:aws:kms:eu-central-1:123456789012:key/1" }

  assert {
    condition = alltrue([
      for policy in aws_iam_policy.role : length([
        for one in jsondecode(policy.policy).Statement : one
        if one.Resource == ["arn:aws:kms:eu-central-1:123456789012:key/1"]
        && try(one.Condition.StringLike["kms:ViaService"], null) == ["s3.*.amazonaws.com"]
      ]) == 1
    ])
    error_message = "rights to the key"
  }
}

run "a_directory_bucket_knows_sessions_only" {
  variables {
    is_directory = true
    bucket_arn   = "arn:aws:s3express:us-east-1:123456789012:bucket/kv-test--use1-az4--x-s3"
  }

  assert {
    condition = alltrue(flatten([
      for policy in aws_iam_policy.role : [
        for one in jsondecode(policy.policy).Statement :
        one.Action == ["s3express:CreateSession"] && one.Resource == [var.bucket_arn]
      ]
    ]))
    error_message = "rights that such a bucket does not know"
  }
  assert {
    condition = (
      jsondecode(aws_iam_policy.role["reader"].policy).Statement[0].Condition.StringEquals["s3express:SessionMode"] == "ReadOnly"
      && !strcontains(aws_iam_policy.role["writer"].policy, "ReadOnly")
    )
    error_message = "readers write, or writers do not"
  }
}

run "tenants_in_a_directory_bucket_are_refused" {
  command = plan
  variables {
    is_directory = true
    tenants      = ["a"]
  }
  expect_failures = [var.tenants]
}

run "a_tenant_that_is_a_pattern_is_refused" {
  command = plan
  variables { tenants = ["a*"] }
  expect_failures = [var.tenants]
}
