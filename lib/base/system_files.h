/* The operating system's files as a file table. */
#ifndef GLM52_BASE_SYSTEM_FILES_H
#define GLM52_BASE_SYSTEM_FILES_H

#include "glm52.h"

extern const glm52_files system_files;

#endif
