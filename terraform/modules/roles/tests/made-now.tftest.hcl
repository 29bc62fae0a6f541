mock_provider "aws" {}

run "what_is_only_made_now_may_be_trusted" {
  module {
    source = "./tests/made-now"
  }

  assert {
    condition     = keys(output.role_arns) == ["reader", "sweeper", "writer"]
    error_message = "roles"
  }
}
