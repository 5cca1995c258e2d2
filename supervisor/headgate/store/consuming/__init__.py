"""Reading the events of a watcher in commit order, and the consumers whose place in them is stored."""
