"""One model call: from the decoded request to the committed answer."""
