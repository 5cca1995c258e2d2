"""What each page shows: a module for each subject, with a function for each page."""
