"""Relations between positions: operators, token sets, predicates, and all heads bound at n."""
