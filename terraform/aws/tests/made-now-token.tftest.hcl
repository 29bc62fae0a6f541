mock_provider "aws" {
  mock_data "aws_iam_policy_document" {
    defaults = { json = "{}" }
  }
}

run "so_may_an_auth_token" {
  module {
    source = "./tests/made-now"
  }
  variables { has_token = true }

  assert {
    condition     = !can(output.environments["writer"].OBJKV_REDIS_USERNAME)
    error_message = "a user that is not there"
  }
}
