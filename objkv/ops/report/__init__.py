"""The audit as one page of HTML that needs nothing else: no network, no server, no library."""

from objkv.ops.report.page import html_report

__all__ = ["html_report"]
