"""Problems that would make a run fail, found before anything is changed."""
